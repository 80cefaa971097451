"""Answers: the loop, samplers, and text that comes token by token."""
