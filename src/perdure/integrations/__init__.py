"""Other people's worlds, made durable: each module imports its SDK when it is first used, never when perdure is imported."""
