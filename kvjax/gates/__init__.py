"""Gates: small networks that were trained to score tokens by their hidden states, and their files."""
