"""Messages of a conversation: their content, rendering by chat templates, spans of turns, control tokens."""
