"""The processes of one job: how they find each other and notice that one of them has ended."""
