"""The worker process: model, data, inner optimizer and the method task; torch lives here."""
