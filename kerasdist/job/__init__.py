"""The processes of a job: they find each other, and notice if one of them ends."""
