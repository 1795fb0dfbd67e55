"""Images in messages: their files, the tokens they become, and the inputs of the model that are made from them."""
