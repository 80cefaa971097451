"""One file, or one folder, per method: its paper's equations, its parts, its preset. `common` has what several use.

`kvjax.policies` has the presets, `kvjax.parts` the parts; nothing else imports this package.
"""
