"""Your own models, losses and data sources: name them in params.yaml as pipeline.custom.module:function."""
