"""Circuit breakers, retries and fallbacks: `fallback(breaker(retry(call)))`."""
