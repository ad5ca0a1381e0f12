"""What all ranks hold alike: parameters and buffers, compared by name, copied, and watched for change and drift."""
