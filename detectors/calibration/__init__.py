"""The calibration kit: from labelled texts and a model to the files in ``model_configs``."""
