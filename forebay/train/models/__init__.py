"""The models of the reference loop, one file a family; `table` names the families."""
