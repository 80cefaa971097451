"""`kvjax serve`: an HTTP server that speaks OpenAI's protocol, in front of one `kvjax.Engine`.

    engine = kvjax.Engine(params, policy, rows=8, max_prompt=4096, max_new_tokens=1024, tokenizer=tokenizer)
    ending = Ending()
    app = application(engine, Settings("smollm2", "morphkv:budget=512"), ending)
    run(app, ending, listen("127.0.0.1", 8000), patience=60)

`application` returns an ASGI application. It needs the extra `serve`. See docs/guide/serving.md.
"""

from .application import application
from .server import Ending, listen, run
from .settings import Settings

__all__ = ["Ending", "Settings", "application", "listen", "run"]
