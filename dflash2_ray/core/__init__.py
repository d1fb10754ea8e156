"""Pure Python decisions and messages: no torch, no ray, no HTTP."""
