"""The package version. A leaf: it enters cache keys, and a source tree must compute the same keys as a wheel."""

VERSION = "0.1.0"
