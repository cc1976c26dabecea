"""The command line: what people type. It uses the layers below and owns no state of its own."""
