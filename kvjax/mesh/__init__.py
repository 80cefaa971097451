"""Several devices: where arrays lie, heads per device, and tokens to experts."""
