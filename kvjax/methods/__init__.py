"""Methods: a file or folder each has the paper's equations, the parts and the preset. `common` has shared parts.

`kvjax.policies` has the presets, `kvjax.parts` the parts; nothing else imports this package.
"""
