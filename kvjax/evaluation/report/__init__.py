"""Reports: tables and plots of the results of runs. They need no model and no device."""
