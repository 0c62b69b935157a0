"""The kernel cache: labelled fields and bytes on disk, content addressed, never half-written."""
