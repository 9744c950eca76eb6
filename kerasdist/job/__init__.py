"""The processes of one job: how they find each other, and learn of each other's end."""
