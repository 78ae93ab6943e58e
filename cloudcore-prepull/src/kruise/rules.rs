//! What is allowed, in Kruise's words.
