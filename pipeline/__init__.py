"""Tightfit: mixed precision with gradient accumulation, exact, planned and reproducible."""
