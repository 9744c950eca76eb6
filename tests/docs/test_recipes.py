"""The manifest of the recipes is what Kubeflow publishes."""

import yaml
from kubeflow_trainer_api import models

from tests.docs.blocks import blocks_of


def test_the_train_job_is_of_the_published_schema():
    [text] = [block.text for block in blocks_of("docs/recipes.md") if block.language == "yaml"]
    manifest = yaml.safe_load(text)
    # A field that the type does not know is left out of what it writes back.
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest
