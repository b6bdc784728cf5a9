"""Where bytes rest: device, host and disk, behind one protocol."""
