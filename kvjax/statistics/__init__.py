"""Statistics: what was measured of a model's queries on texts, their files, and how policies find them."""
