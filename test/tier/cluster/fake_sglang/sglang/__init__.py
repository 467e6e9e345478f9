"""Stands in for SGLang where a test is about starting and ending servers, not about serving."""
