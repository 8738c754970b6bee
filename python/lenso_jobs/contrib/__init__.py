"""Integrations with frameworks, one module and one extra for each."""
