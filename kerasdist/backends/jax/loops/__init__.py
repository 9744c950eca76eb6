"""Custom loops: `run`, `function`, values of replicas, collectives."""
