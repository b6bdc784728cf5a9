"""Transports between ranks: one protocol, one transport per kind of link, one place that counts."""
