"""The laws that codecs and exchanges obey, for tests of this package, of plug-ins, and for `thinwire selftest`; needs no test framework."""
