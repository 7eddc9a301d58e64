"""The steps that come, as a loader tells the node of them, and the downloads for them."""
