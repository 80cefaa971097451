"""kvjax keeps the key-value cache of a decoder small."""
