"""Quality of the uses beside guarding: reranking and schema linking, on labelled data."""
