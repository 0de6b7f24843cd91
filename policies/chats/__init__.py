"""Chats: messages, chat templates and their inverse, and a chat as text, tokens or history."""
