"""What Hugging Face's own tests of generation ask for, asked of patched models; written anew."""
