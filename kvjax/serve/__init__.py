"""`kvjax serve`: an HTTP server that speaks OpenAI's protocol, in front of one `kvjax.Engine` per policy.

    policies = {"morphkv": "morphkv:budget=512", "full": "full"}
    engines = kvjax.engine.Engines(params, policies, rows=8, max_prompt=4096, max_new_tokens=1024, tokenizer=tokenizer)
    models = models_of("smollm2", policies, engines)  # smollm2@morphkv and smollm2@full
    ending = Ending()
    app = application(models, Settings(), ending)
    run(app, ending, listen("127.0.0.1", 8000), patience=60)

`application` returns an ASGI application. It needs the extra `serve`. See docs/guide/serving.md.
"""

from .application import application
from .models import Model, Models, models_of, named_policies
from .server import Ending, listen, run
from .settings import Settings

__all__ = [
    "Ending",
    "Model",
    "Models",
    "Settings",
    "application",
    "listen",
    "models_of",
    "named_policies",
    "run",
]
