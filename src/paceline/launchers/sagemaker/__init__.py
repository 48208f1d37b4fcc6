"""``--on sagemaker``: training jobs on Amazon SageMaker."""
