"""Where values lie on the devices: placement, layout, sharding."""
