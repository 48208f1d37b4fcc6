"""``--coordinator etcd://...``: etcd decides which node leads, and which nodes take part."""
