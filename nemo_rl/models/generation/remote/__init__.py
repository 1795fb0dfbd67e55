"""A model that another server has: it is asked with messages over HTTP, and its tokens and weights are not known here.

    ChatModel (a GenerationInterface) ─► fields: request as JSON ─► connection: HTTP ─► server
                                      ◄─ answers: text, tool calls, numbers of tokens ◄──┘

The tokenizer of `chats` takes the place of the model's tokenizer, and `check` asks the server before a run starts.
"""
