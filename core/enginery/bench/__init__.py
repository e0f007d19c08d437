"""What `engine bench` does: workloads, measurements, and how far from the device's limits they are. Nothing else needs it."""
