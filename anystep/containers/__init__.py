"""Files of records: ArrayRecord, TFRecord and Parquet, read by blocks and checked as they are read.

Bytes in, bytes out: records are not parsed here. A new container is a file here and a row in `containers`.
"""
