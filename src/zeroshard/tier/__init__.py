"""Memory in which states rest: device, host and disk, behind one protocol."""
