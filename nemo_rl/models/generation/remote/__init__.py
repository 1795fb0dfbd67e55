"""Use a model on another server, which gets messages over HTTP and does not show its tokens and weights.

    ChatModel (a GenerationInterface) ─► fields: request as JSON ─► connection: HTTP ─► server
                                      ◄─ answers: text, tool calls, numbers of tokens ◄──┘

The tokenizer of `chats` takes the place of the model's tokenizer, and `check` asks the server before a run starts.
"""
