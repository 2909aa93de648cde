"""Issues and rotates the CA and the serving certificate of the webhook."""
