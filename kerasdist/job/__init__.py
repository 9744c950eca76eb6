"""The processes of one job: how they find each other, and learn that another one has ended."""
