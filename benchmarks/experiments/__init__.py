"""What memory and scheduling bring, each shown by one real run: `octavo bench NAME`."""
