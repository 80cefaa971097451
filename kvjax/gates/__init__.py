"""Gates: small networks that were trained to score tokens by their hidden states, and their files."""

from kvjax.gates.attach import with_gates
from kvjax.gates.files import Gates, read_gates, write_gates

__all__ = ["Gates", "read_gates", "with_gates", "write_gates"]
