"""What a loader tells the node of the steps that come, and what is downloaded for them."""
