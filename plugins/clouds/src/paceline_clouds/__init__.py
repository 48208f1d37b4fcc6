"""Jobs on SageMaker, Azure ML and Google Cloud."""
