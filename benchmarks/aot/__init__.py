"""Compiling ahead: lowering for devices that are absent, their facts, and counts in compiled programs."""
