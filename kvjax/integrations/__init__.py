"""kvjax inside other packages: one folder each, which imports its package and is imported by nothing."""
