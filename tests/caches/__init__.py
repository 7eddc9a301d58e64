"""Tests of forebay.caches."""
