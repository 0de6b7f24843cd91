"""Chats: messages as data, chat templates forwards and backwards, the views of one chat."""
